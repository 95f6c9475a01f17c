"""The Quark persistence service: its protocol, the server, and the client backend."""
