"""Workers as forks of a process that has their libraries."""

import os
import select
import subprocess
import sys
import threading

import pytest

from rlinf_wamrl.runtime import worker_template

WORKER = """
import os, sys
print(os.environ["GREETING"], sys.argv[1], os.getcwd(), os.getpid(), "torch" in sys.modules)
sys.stdout.flush()
sys.exit(3)
"""


def run_python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, **kwargs
    ).stdout


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from rlinf_wamrl.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'ray', 'rlinf', 'hydra', 'numpy'} & set(sys.modules)))"
    )
    assert run_python(code).splitlines()[-1] == "[]"


def test_nothing_before_the_fork_imports_ray_or_starts_threads_or_cuda():
    """Ray's library reads its worker's environment when it is loaded."""
    code = (
        "import importlib, sys, threading\n"
        f"for module in {worker_template.PRELOADED!r}: importlib.import_module(module)\n"
        "import torch\n"
        "print(sorted({'ray', 'rlinf'} & set(sys.modules)), threading.active_count(),\n"
        "      torch.cuda.is_initialized())"
    )
    assert run_python(code).splitlines()[-1] == "[] 1 False"


def test_a_module_that_imports_ray_is_refused(monkeypatch):
    monkeypatch.setattr(worker_template, "PRELOADED", ("json",))
    monkeypatch.setitem(sys.modules, "ray", object())
    with pytest.raises(RuntimeError, match="json imports Ray"):
        worker_template.preload()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    failures = []
    with worker_template.worker_template(
        tmp_path_factory.mktemp("template"), failures.append
    ) as script:
        yield script
    assert not failures


def launch(script, tmp_path, code=WORKER):
    worker = tmp_path / "worker.py"
    worker.write_text(code)
    return subprocess.Popen(
        [sys.executable, script, "--language=PYTHON", str(worker), "hello"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "GREETING": "good morning"},
    )


def test_a_forked_worker_has_the_launchers_arguments_environment_folder_streams(launcher, tmp_path):
    process = launch(launcher, tmp_path)
    greeting, _ = process.communicate(timeout=60)
    words = greeting.split()
    assert words[:3] == ["good", "morning", "hello"] and words[3] == str(tmp_path)
    assert int(words[4]) != process.pid and words[5] == "True"
    assert process.returncode == 3  # its status is the launcher's


def test_a_killed_launcher_takes_its_worker_along(launcher, tmp_path):
    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    process = launch(launcher, tmp_path, code)
    worker = int(process.stdout.readline())
    handle = os.pidfd_open(worker)
    process.kill()
    process.wait()
    assert select.select([handle], [], [], 30.0)[0]


def test_a_template_that_cannot_start_is_reported(tmp_path, monkeypatch):
    reported, statuses = threading.Event(), []

    def report(status):
        statuses.append(status)
        reported.set()

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with worker_template.worker_template(tmp_path, report):
        assert reported.wait(30.0)
    assert statuses == [1]
