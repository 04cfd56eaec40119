"""Draws a simulation's cameras off screen, on demand and with a choice of quality."""

from __future__ import annotations

import weakref

import mujoco
import numpy as np

from rlinf_wamrl.envs.culling import Culling

__all__ = ["Drawing"]

_HIDDEN_GROUP = mujoco.mjNGROUP - 1  # not drawn by default, and only drawing looks at groups


class Drawing:
    """Owns the OpenGL context of one robosuite environment.

    Args:
        env: A robosuite environment built without an off-screen renderer.
        cameras: Camera names; :meth:`draw` returns one picture for each.
        settings: ``image_size`` and ``render_quality``.
    """

    def __init__(self, env, cameras: tuple[str, ...], settings) -> None:
        from robosuite.utils.binding_utils import GLContext

        self._model, self._data = env.sim.model._model, env.sim.data._data
        self._size = settings.image_size
        self._cameras = [env.sim.model.camera_name2id(name) for name in cameras]
        visual = self._model.vis
        visual.global_.offwidth = visual.global_.offheight = self._size
        if not self._model.light_castshadow.any():
            visual.quality.shadowsize = 0  # 64 MiB that would stay empty
        if settings.render_quality != "stock":
            visual.quality.offsamples = 0
        self._context = GLContext(self._size, self._size, -1)
        self._context.make_current()
        self._scene = mujoco.MjvScene(self._model, maxgeom=1000)
        self._culling = Culling(self._model, reflections=settings.render_quality == "stock")
        self._renderer = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_150)
        # MuJoCo frees display lists by number, in whatever context is bound: without this, a
        # collected environment would take the pictures of a living one with it.
        self._finalizer = weakref.finalize(self, _free, self._context, self._renderer)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._renderer)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[0] = 0  # collision shapes
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._viewport = mujoco.MjrRect(0, 0, self._size, self._size)

    def draw(self) -> list[np.ndarray]:
        """One picture per camera, uint8 [H, W, 3], rotated by 180 degrees from LIBERO's own.

        OpenGL rows run bottom up, which LIBERO keeps, so its picture stands on its head; the
        field's convention turns it by 180 degrees, which also mirrors left and right.
        """
        # Always: building or freeing another environment's context unbinds this one.
        self._context.make_current()
        pictures = []
        for camera in self._cameras:
            self._update_scene(camera)
            mujoco.mjr_render(self._viewport, self._scene, self._renderer)
            rows = np.empty((self._size, self._size, 3), dtype=np.uint8)
            mujoco.mjr_readPixels(rows, None, self._viewport, self._renderer)
            pictures.append(rows[::-1, ::-1])
        return pictures

    def _update_scene(self, camera: int) -> None:
        """Collect what a camera may see."""
        invisible, mirrors = self._culling.invisible(self._data, camera)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = mirrors
        self._camera.fixedcamid = camera
        groups = self._model.geom_group.copy()
        self._model.geom_group[invisible] = _HIDDEN_GROUP
        mujoco.mjv_updateScene(
            self._model,
            self._data,
            self._option,
            None,
            self._camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self._scene,
        )
        self._model.geom_group[:] = groups

    def close(self) -> None:
        """Free the context."""
        self._finalizer()


def _free(context, renderer: mujoco.MjrContext) -> None:
    context.make_current()
    renderer.free()
    context.free()
