"""Requests and replies of the service, whatever they are about."""
