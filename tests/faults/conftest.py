"""Small disks to fill, break and take away."""

import subprocess

import pytest


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def mount(tmp_path_factory):
    """Mount a small disk; returns its directory. Skips where that is not allowed."""
    mounted = []

    def mount_one(*options):
        directory = tmp_path_factory.mktemp("disk")
        done = run("mount", *options, str(directory))
        if done.returncode:
            pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount_one
    for directory in mounted:
        run("umount", "-l", str(directory))


@pytest.fixture
def make_disk(mount, tmp_path):
    """A disk of 2 MB (tmpfs), of 8 MB (ext4 on a loop device), or with few inodes."""

    def make(kind):
        if kind == "tmpfs":
            return mount("-t", "tmpfs", "-o", "size=2m", "tmpfs")
        if kind == "inodes":
            return mount("-t", "tmpfs", "-o", "size=64m,nr_inodes=48", "tmpfs")
        image = tmp_path / "disk.img"
        with image.open("wb") as file:
            file.truncate(8 * 1024 * 1024)
        try:
            made = run("mkfs.ext4", "-q", "-F", str(image))
        except FileNotFoundError:
            pytest.skip("needs mkfs.ext4")
        assert made.returncode == 0, made.stderr
        return mount("-o", "loop", str(image))

    return make
