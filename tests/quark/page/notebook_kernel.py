"""A real kernel, and what a notebook would be told by it."""

import queue
import time

import pytest

_REASON = "needs jupyter_client and ipykernel: pip install --group notebook"
DEADLINE_S = 120


class Kernel:
    """One kernel of this interpreter, and all that it has said so far.

    Attributes:
        said: Messages in their order.
    """

    def __init__(self, folder):
        manager = pytest.importorskip("jupyter_client.manager", reason=_REASON)
        pytest.importorskip("ipykernel", reason=_REASON)
        self._manager = manager.KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=DEADLINE_S)
        self.said = []

    def begin(self, code, cell=None):
        """Have a cell executed; the id of the request."""
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {},
                   "allow_stdin": False, "stop_on_error": False}  # fmt: skip
        metadata = {} if cell is None else {"cellId": cell}
        message = self._client.session.msg("execute_request", content, metadata=metadata)
        self._client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def run(self, code, cell=None):
        """Have a cell executed to its end; what it has printed and its error, as one text."""
        asked = self.begin(code, cell)
        self.wait(lambda: self.is_done(asked))
        return self.read_output(asked)

    def is_done(self, asked):
        return any(
            each["msg_type"] == "status"
            and each["content"]["execution_state"] == "idle"
            and each["parent_header"].get("msg_id") == asked
            for each in self.said
        )

    def read_output(self, asked):
        parts = []
        for each in self.said:
            if each["parent_header"].get("msg_id") == asked:
                content = each["content"]
                parts += [content["text"]] if each["msg_type"] == "stream" else []
                parts += content["traceback"] if each["msg_type"] == "error" else []
        return "".join(parts)

    def wait(self, condition):
        """Listen until a condition of what was said holds; returns what it gives."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, [each["msg_type"] for each in self.said[-30:]]
            try:
                self.said.append(self._client.get_iopub_msg(timeout=0.2))
            except queue.Empty:
                continue
        return found

    def list(self, *types):
        return [each for each in self.said if each["msg_type"] in types]

    def list_parts(self):
        """The packs that went to the browser, in their order."""
        parts = []
        for each in self.list("comm_open", "comm_msg"):
            paths = each["content"]["data"].get("buffer_paths", [])
            for (name, *_), data in zip(paths, each["buffers"], strict=True):
                if name in ("whole", "news") and len(data):
                    parts.append(bytes(data))
        return parts

    def read_displays(self):
        """Display id -> what stands there now, in their order."""
        shown = {}
        for each in self.list("display_data", "update_display_data"):
            place = each["content"]["transient"].get("display_id")
            if place is not None:
                shown[place] = each["content"]["data"]
        return list(shown.values())

    def tell(self, content):
        """Say to the newest widget what a browser would."""
        comm_id = self.list("comm_open")[-1]["content"]["comm_id"]
        data = {"method": "custom", "content": content}
        message = self._client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        self._client.shell_channel.send(message)

    def interrupt(self):
        self._manager.interrupt_kernel()

    def restart(self):
        """As the button of a notebook does it: the kernel is asked to end, and begun anew."""
        self._manager.restart_kernel(now=False)

    def kill(self):
        """As the machine does that has no memory left."""
        self._manager.shutdown_kernel(now=True)

    def close(self):
        self._client.stop_channels()
        if self._manager.is_alive():
            self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
