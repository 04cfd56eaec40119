"""Leaving out what a camera cannot see, against MuJoCo's own renderer, which leaves out nothing."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlinf_wamrl.envs.libero_setup import bootstrap_libero
from rlinf_wamrl.envs.settings import EnvSettings

SIZE = 48
SCENE = """
<mujoco>
  <asset><material name="mirror" reflectance="0.6"/></asset>
  <visual><map znear="0.01"/></visual>
  <worldbody>
    <light pos="0 0 3" dir="0 0 -1" castshadow="{shadows}"/>
    <geom name="floor" type="plane" size="3 3 0.1" pos="0 0 -0.5" group="1" {floor}/>
    <camera name="camera" pos="0 -1 0.6" xyaxes="1 0 0 0 0.5 0.9" fovy="45"/>
    <geom name="mirror" type="box" size="0.3 0.2 0.02" euler="5 -5 30" group="1" material="mirror"/>
    <geom name="above" type="sphere" size="0.1" pos="0 1 0.7" rgba="1 0 0 1" group="1"/>
    <geom name="behind" type="sphere" size="0.1" pos="0 -2 0.2" rgba="0 1 0 1" group="1"/>
    {others}
  </worldbody>
</mujoco>
"""


@pytest.fixture(scope="module")
def mujoco():
    bootstrap_libero()
    return pytest.importorskip("mujoco")


def load(mujoco, others="", shadows="false", floor=""):
    model = mujoco.MjModel.from_xml_string(
        SCENE.format(others=others, shadows=shadows, floor=floor)
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def invisible_names(mujoco, model, data, reflections=True):
    from rlinf_wamrl.envs.culling import Culling

    invisible, mirror = Culling(model, reflections=reflections).invisible(data, 0)
    names = {mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_GEOM, i) for i in range(model.ngeom)}
    seen = {
        mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_GEOM, i) for i in np.flatnonzero(~invisible)
    }
    return names - seen, mirror


def test_what_a_mirror_shows_is_kept(mujoco):
    model, data = load(mujoco)
    assert invisible_names(mujoco, model, data) == ({"behind"}, True)
    assert invisible_names(mujoco, model, data, reflections=False) == ({"above", "behind"}, False)


def test_mirror_seen_from_below_shows_nothing(mujoco):
    model, data = load(mujoco)
    model.geom_quat[model.geom("mirror").id] = [0.0, 1.0, 0.0, 0.0]  # face down
    mujoco.mj_forward(model, data)
    assert invisible_names(mujoco, model, data) == ({"above", "behind"}, False)


@pytest.mark.parametrize("change", [{"shadows": "true"}, {"floor": 'material="mirror"'}])
def test_shadows_and_endless_mirrors_keep_everything(mujoco, change):
    model, data = load(mujoco, **change)
    assert invisible_names(mujoco, model, data) == (set(), True)


@pytest.mark.parametrize("seed", range(8))
def test_pictures_are_those_of_the_whole_scene(mujoco, seed):
    from rlinf_wamrl.envs.drawing import Drawing

    rng = np.random.default_rng(seed)
    others = []
    for kind in ("sphere", "box", "capsule", "cylinder", "ellipsoid") * 12:
        size, place = rng.uniform(0.01, 0.15, 3), rng.uniform([-2, -3, -0.4], [2, 2, 2])
        turn, color = rng.uniform(0, 360, 3), rng.uniform(0, 1, 3)
        numbers = {"size": size, "pos": place, "euler": turn, "rgba": [*color, 1]}
        text = " ".join(f'{k}="{" ".join(map(str, v))}"' for k, v in numbers.items())
        others.append(f'<geom type="{kind}" group="1" {text}/>')
    model, data = load(mujoco, others="".join(others))
    with mujoco.Renderer(model, SIZE, SIZE) as renderer:
        renderer.update_scene(data, camera="camera")
        expected = renderer.render().copy()
    env = SimpleNamespace(
        sim=SimpleNamespace(
            model=SimpleNamespace(_model=model, camera_name2id=lambda name: model.camera(name).id),
            data=SimpleNamespace(_data=data),
        )
    )
    drawing = Drawing(env, ("camera",), EnvSettings(image_size=SIZE, render_quality="stock"))
    groups = model.geom_group.copy()
    [picture] = drawing.draw()
    drawn = drawing._scene.ngeom
    drawing.close()
    np.testing.assert_array_equal(picture[:, ::-1], expected)
    np.testing.assert_array_equal(model.geom_group, groups)
    assert drawn < 0.7 * model.ngeom
