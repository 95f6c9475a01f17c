"""`quark ui` in a process of its own, asked over HTTP as its page asks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

DEADLINE_S = 60


class UiProcess:
    """One server; `end` sees to it that it has ended."""

    def __init__(self, folder, *arguments, **environment):
        command = [sys.executable, "-m", "quark", "ui", str(folder), "--no-open", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        line = self.process.stdout.readline()
        link = re.search(r"http://\S+", line)
        if link is None:
            raise AssertionError(line + self.process.communicate(timeout=DEADLINE_S)[1])
        self.root = link[0].partition("?")[0]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        self._opener.open(link[0], timeout=DEADLINE_S).close()

    def get(self, path, **parameters):
        """Status and body of an answer: of JSON what it says, else bytes."""
        query = f"?{urllib.parse.urlencode(parameters, doseq=True)}" if parameters else ""
        try:
            with self._opener.open(f"{self.root}{path}{query}", timeout=DEADLINE_S) as answer:
                status, kind, body = answer.status, answer.headers["content-type"], answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, kind, body = error.code, error.headers["content-type"], error.read()
        return status, json.loads(body) if kind == "application/json" else body

    def wait_for(self, path, is_there, **parameters):
        """The first answer of status 200 that fits."""
        end = time.monotonic() + DEADLINE_S
        while True:
            status, body = self.get(path, **parameters)
            if status == 200 and is_there(body):
                return body
            assert time.monotonic() < end, (status, body)
            time.sleep(0.05)

    def wait_for_analysis(self, run_id, states=("computed", "failed")):
        """What is said of a run by analysis, once it is."""
        found = self.wait_for(
            f"api/runs/{run_id}/analysis", lambda body: body["analysis"]["state"] in states
        )
        return found["analysis"]

    def end(self):
        """Exit status, and what it has printed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            out, err = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
        return self.process.returncode, out, err
