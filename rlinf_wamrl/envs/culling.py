"""Which geoms of a MuJoCo model cannot show up in a camera's picture.

Drawing LIBERO's scenes in software costs in proportion to the triangles sent to the renderer, and
many of them lie behind the camera or beside its view. MuJoCo sends them all.
"""

from __future__ import annotations

import mujoco
import numpy as np

__all__ = ["Culling"]

_MARGIN = 1e-3  # m, far above rounding errors
_CORNERS = np.array([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])


class Culling:
    """Finds the geoms that a picture can do without, to the last bit.

    A geom is left out if its bounding box lies wholly beyond one side of the camera's view. A
    mirror (the top face of a box of reflective material) shows what lies elsewhere: while one is in
    view, what the mirrored camera sees through that face counts as well. Nothing is left out of a
    scene with reflective planes, whose mirrors have no end, or with shadows, which fall into a view
    from anywhere.

    Args:
        model: The model.
        reflections: Whether mirrors are drawn as such.
    """

    def __init__(self, model: mujoco.MjModel, *, reflections: bool) -> None:
        self._model = model
        self._centers = model.geom_aabb[:, :3].copy()
        self._halves = model.geom_aabb[:, 3:].copy()
        self._planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
        boxes = model.geom_type == mujoco.mjtGeom.mjGEOM_BOX
        materials = model.geom_matid
        reflective = reflections & (materials >= 0) & (model.mat_reflectance[materials] > 0.0)
        self._mirrors = np.flatnonzero(reflective & boxes)
        self._endless = bool((reflective & self._planes).any())
        self._all_count = self._endless or bool(model.light_castshadow.any())

    def invisible(self, data: mujoco.MjData, camera: int) -> tuple[np.ndarray, bool]:
        """What a picture can do without.

        Args:
            data: Poses of geoms and cameras.
            camera: A fixed camera; pictures are as wide as they are high.

        Returns:
            bool [ngeom], true for a geom that cannot be seen, and whether a mirror may be seen.
        """
        if self._all_count:
            return np.zeros(self._model.ngeom, dtype=bool), self._endless or self._mirrors.size > 0
        axes = data.geom_xmat.reshape(-1, 3, 3)
        centers = data.geom_xpos + np.einsum("nij,nj->ni", axes, self._centers)
        position = data.cam_xpos[camera]
        sides = self._view(data.cam_xmat[camera].reshape(3, 3), camera)
        invisible = self._beyond(position, sides, centers, axes)
        in_view = False
        for mirror in self._mirrors[~invisible[self._mirrors]]:
            rotation, size = axes[mirror], self._model.geom_size[mirror]
            normal = rotation[:, 2]
            face = data.geom_xpos[mirror] + size[2] * normal
            height = normal @ (position - face)
            if height <= 0.0:
                continue  # its back is turned
            in_view = True
            mirrored = position - 2.0 * height * normal
            corners = face - mirrored + (_CORNERS * size[:2]) @ rotation[:, :2].T
            # Counter-clockwise as seen from the front, so these normals point outward.
            through = np.cross(np.roll(corners, -1, axis=0), corners)
            through /= np.linalg.norm(through, axis=1, keepdims=True)
            invisible &= self._beyond(mirrored, through, centers, axes)
        return invisible, in_view

    def _view(self, rotation: np.ndarray, camera: int) -> np.ndarray:
        """Outward normals [5, 3] of the view's four sides and of its back."""
        half = np.deg2rad(self._model.cam_fovy[camera]) / 2.0
        sine, cosine = np.sin(half), np.cos(half)
        # A camera looks along its negative z axis.
        sides = [[cosine, 0, sine], [-cosine, 0, sine], [0, cosine, sine], [0, -cosine, sine]]
        return np.array([*sides, [0, 0, 1]]) @ rotation.T

    def _beyond(
        self, position: np.ndarray, sides: np.ndarray, centers: np.ndarray, axes: np.ndarray
    ) -> np.ndarray:
        """Boxes [ngeom] wholly beyond one of the planes through ``position``."""
        distance = (centers - position) @ sides.T
        reach = np.einsum("ni,nis->ns", self._halves, np.abs(np.einsum("nji,sj->nis", axes, sides)))
        return (distance > reach + _MARGIN).any(axis=1) & ~self._planes
