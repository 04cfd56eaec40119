"""Choice of the off-screen renderer and of the GPU it draws on."""

import os
import subprocess
import sys

import pytest

from rlinf_wamrl.envs.rendering import egl_device_index, renderer_environment

BOTH = {"egl", "osmesa"}


@pytest.mark.parametrize(
    ("environ", "has_gpu", "libraries", "renderer"),
    [
        ({}, False, BOTH, "osmesa"),
        ({}, True, BOTH, "egl"),
        ({"MUJOCO_GL": "osmesa"}, True, BOTH, "osmesa"),
        ({"MUJOCO_GL": "EGL "}, False, BOTH, "egl"),
        ({"MUJOCO_GL": ""}, False, {"osmesa"}, "osmesa"),
    ],
)
def test_renderer_follows_the_user_then_the_gpu(environ, has_gpu, libraries, renderer):
    chosen = renderer_environment(environ, has_gpu=has_gpu, libraries=libraries)
    assert chosen == {"MUJOCO_GL": renderer, "PYOPENGL_PLATFORM": renderer}


def test_gpu_without_egl_warns_that_software_is_slow():
    with pytest.warns(RuntimeWarning, match="several times slower.*apt-get install -y libegl1"):
        chosen = renderer_environment({}, has_gpu=True, libraries={"osmesa"})
    assert chosen["MUJOCO_GL"] == "osmesa"


@pytest.mark.parametrize(
    ("environ", "package"),
    [({}, "libosmesa6"), ({"MUJOCO_GL": "egl"}, "libegl1 libegl-mesa0")],
)
def test_missing_library_names_the_command(environ, package):
    with pytest.raises(RuntimeError, match=f"apt-get install -y {package}"):
        renderer_environment(environ, has_gpu=False, libraries=set())


def test_renderer_that_needs_a_display_is_refused():
    with pytest.raises(ValueError, match="MUJOCO_GL=glfw: this renderer needs a display"):
        renderer_environment({"MUJOCO_GL": "glfw"}, has_gpu=False, libraries=BOTH)


@pytest.mark.parametrize(
    ("local_rank", "visible", "egl_cuda_ids", "device"),
    [
        (0, None, [0, 1, None], 0),
        (1, "", [0, 1, None], 1),
        (0, "3", [0, 1, 2, 3], 3),
        (1, "2,0", [0, 1, 2, 3], 0),
        (0, "2", [3, 2, 1, 0, None], 1),  # EGL counts the other way round
        (0, "7", [0, None], 0),  # a container that shows EGL one GPU of eight
        (1, "4,7", [None, 1, 0], 1),
    ],
)
def test_egl_device_of_a_cuda_gpu(local_rank, visible, egl_cuda_ids, device):
    assert egl_device_index(local_rank, visible, egl_cuda_ids) == device


@pytest.mark.parametrize(
    ("local_rank", "visible", "egl_cuda_ids", "message"),
    [
        (1, "5", [0, 1], "shows only 1"),
        (0, "GPU-8a3f", [0], "not UUIDs"),
        (2, None, [0, 1], "no EGL device draws on GPU 2"),
        (0, "7,8", [0, None], "no EGL device draws on GPU 7"),
        (0, None, [None], "no EGL device draws on GPU 0"),
    ],
)
def test_gpu_without_egl_device_is_told(local_rank, visible, egl_cuda_ids, message):
    with pytest.raises(ValueError, match=message):
        egl_device_index(local_rank, visible, egl_cuda_ids)


def run_python(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        timeout=120,
    )


def test_importing_libero_is_silent_and_asks_nothing(tmp_path):
    """Also in several processes at once, without a home folder that could be written to."""
    program = (
        "from rlinf_wamrl.envs.libero_setup import bootstrap_libero; bootstrap_libero();"
        "import sys; assert 'torch' not in sys.modules"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "HOME": "/nonexistent",
                "TMPDIR": str(tmp_path),
            },
        )
        for _ in range(3)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert (process.returncode, output) == (0, "")
    assert len(list(tmp_path.glob("rlinf_wamrl_libero_*/config.yaml*"))) == 1


def test_renderer_cannot_change_after_mujoco_is_imported():
    program = (
        "import mujoco, os; os.environ.pop('MUJOCO_GL', None);"
        "from rlinf_wamrl.envs.rendering import choose_renderer; choose_renderer()"
    )
    result = run_python(program, MUJOCO_GL="disable")
    assert result.returncode == 1
    assert "MuJoCo was imported before the renderer was chosen" in result.stderr
