"""A backend of one's own that keeps its calls."""

import quark


class Recorder(quark.TrackerBackend):
    """Keeps its calls, in order."""

    name = "recorder"

    def __init__(self, **arguments):
        self.arguments = arguments
        self.calls = []

    def log(self, metrics, step=None, commit=True):
        self.calls.append(("log", metrics, step, commit))

    def log_config(self, config):
        self.calls.append(("log_config", config))

    def log_table(self, key, columns, data):
        self.calls.append(("log_table", key, columns, data))

    def log_image(self, key, image_path, caption=None):
        self.calls.append(("log_image", key, image_path, caption))

    def log_artifacts(self, paths):
        self.calls.append(("log_artifacts", paths))

    def watch(self, model, **kwargs):
        self.calls.append(("watch", model, kwargs))

    def finish(self):
        self.calls.append(("finish",))
