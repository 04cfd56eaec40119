"""Changes to a compiled-to-be MuJoCo model that make it lighter without touching its physics."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path

__all__ = ["draw_arm_by_collision_shapes", "shrink_textures"]

_ARM_PREFIXES = ("robot0_", "gripper0_", "mount0_")
_BRIGHT, _DARK = "0.9 0.9 0.9 1", "0.35 0.35 0.35 1"


def draw_arm_by_collision_shapes(model: ET.Element) -> None:
    """Show the arm's collision shapes (a tenth of the faces) in place of its visual meshes.

    The visual geoms stay, because robosuite looks their names up, but as invisible points. The
    arm's bodies state their inertia, so nothing that moves depends on these geoms.
    """
    for geom in model.iter("geom"):
        name = geom.get("name", "")
        if not name.startswith(_ARM_PREFIXES):
            continue
        if geom.get("group") == "1" and geom.get("type") == "mesh":
            for key in ("mesh", "material"):
                geom.attrib.pop(key, None)
            geom.attrib.update(type="sphere", size="0.0001", rgba="0 0 0 0")
        elif geom.get("group", "0") == "0":
            geom.attrib.pop("material", None)
            geom.attrib.update(group="1", rgba=_DARK if "finger" in name else _BRIGHT)
    used = {geom.get("mesh") for geom in model.iter("geom")}
    for assets in model.iter("asset"):
        for mesh in [m for m in assets.findall("mesh") if m.get("name") not in used]:
            assets.remove(mesh)


def shrink_textures(model: ET.Element, limit: int) -> dict[str, bytes]:
    """Replace texture files of more than ``limit`` pixels a side by smaller pictures.

    Returns:
        File name used in the model -> PNG bytes, for MuJoCo's virtual file system.
    """
    from PIL import Image

    files: dict[str, bytes] = {}
    for texture in model.iter("texture"):
        source = texture.get("file")
        if source is None:
            continue
        with Image.open(source) as picture:
            longest = max(picture.size)
            if longest <= limit:
                continue
            size = tuple(max(1, side * limit // longest) for side in picture.size)
            buffer = io.BytesIO()
            picture.convert("RGB").resize(size, Image.Resampling.BOX).save(buffer, format="PNG")
        name = f"texture{len(files)}_{Path(source).stem}.png"
        files[name] = buffer.getvalue()
        texture.set("file", name)
    return files
