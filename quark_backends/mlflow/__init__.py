"""The MLflow mirror: the run as a run of an MLflow tracking server."""
