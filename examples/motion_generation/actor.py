"""An actor of 25 joints that walks, runs, waves, jumps or idles: what both scripts make data of.

``Actor.get_pose`` is the actor as it was: one scene at one time, joint by joint.  ``get_poses`` is new, and
only after.py needs it: the same formulas in the same order, for all frames of many scenes at once.  Numbers
become arrays of scenes and frames, an ``if`` becomes ``np.maximum``, and the loop over joints stays.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

FRAMES, FRAME = 250, 0.04  # frames of a scene, and seconds from one to the next: 10 s
THEMES = ("walk", "run", "wave", "jump", "idle")
SPEEDS = np.array([1.2, 2.8, 0.0, 0.2, 0.0])  # metres a second, by theme
BOUNCES = np.array([0.03, 0.08, 0.0, 0.30, 0.01])  # metres up, by theme

# Joints by name: the parent, and the place as the parent sees it in metres: right, up, ahead.
_MIDDLE = {
    "pelvis": ("", (0.0, 0.95, 0.0)),
    "spine": ("pelvis", (0.0, 0.12, 0.0)),
    "chest": ("spine", (0.0, 0.20, 0.0)),
    "neck": ("chest", (0.0, 0.22, 0.0)),
    "head": ("neck", (0.0, 0.16, 0.03)),
}
_RIGHT = {
    "collar": ("chest", (0.06, 0.16, 0.0)),
    "shoulder": ("collar", (0.13, 0.02, 0.0)),
    "elbow": ("shoulder", (0.0, -0.29, 0.0)),
    "wrist": ("elbow", (0.0, -0.25, 0.0)),
    "hand": ("wrist", (0.0, -0.09, 0.0)),
    "hip": ("pelvis", (0.10, -0.04, 0.0)),
    "knee": ("hip", (0.0, -0.43, 0.0)),
    "ankle": ("knee", (0.0, -0.41, 0.0)),
    "foot": ("ankle", (0.0, -0.06, 0.12)),
    "toe": ("foot", (0.0, -0.01, 0.07)),
}
_SIDES = {f"right_{name}": (parent, place) for name, (parent, place) in _RIGHT.items()} | {
    f"left_{name}": (parent, (-right, up, ahead)) for name, (parent, (right, up, ahead)) in _RIGHT.items()
}
_JOINTS = {
    name: (f"{name.split('_')[0]}_{parent}" if parent in _RIGHT else parent, place)
    for name, (parent, place) in (_MIDDLE | _SIDES).items()
}
NAMES = tuple(_JOINTS)  # parents come before their children
JOINTS = len(NAMES)
PARENTS = tuple(NAMES.index(parent) if parent else None for parent, _ in _JOINTS.values())
OFFSETS = tuple(place for _, place in _JOINTS.values())
PAIRS = tuple((NAMES.index(f"right_{name}"), NAMES.index(f"left_{name}")) for name in _RIGHT)

# What moves, by theme: a joint, the axis about which it turns (0 right, 1 up, 2 ahead), the angle about which
# it swings, how far, and how much later than the beat, in radians.  "both" is right and left alike; of "step"
# the left one swings half a beat after the right one.
_TURNS = {
    "walk": (
        ("step_hip", 0, -0.05, 0.45, 0.0), ("step_knee", 0, 0.35, 0.35, 1.2),
        ("step_shoulder", 0, 0.0, -0.40, 0.0), ("both_elbow", 0, -0.30, 0.15, 0.4),
        ("spine", 1, 0.0, 0.08, 0.0), ("pelvis", 1, 0.0, -0.08, 0.0),
    ),
    "run": (
        ("step_hip", 0, -0.25, 0.70, 0.0), ("step_knee", 0, 0.80, 0.60, 1.2),
        ("step_shoulder", 0, 0.0, -0.60, 0.0), ("both_elbow", 0, -1.30, 0.20, 0.4),
        ("spine", 0, 0.15, 0.05, 0.0), ("pelvis", 1, 0.0, -0.12, 0.0),
    ),
    "wave": (
        ("right_shoulder", 2, 2.20, 0.20, 0.0), ("right_elbow", 2, 0.50, 0.60, 0.3),
        ("right_hand", 2, 0.0, 0.30, 0.6), ("head", 2, 0.05, 0.05, 0.0), ("spine", 2, 0.0, 0.04, 0.0),
    ),
    "jump": (
        ("both_hip", 0, -0.40, 0.40, 0.0), ("both_knee", 0, 0.80, -0.70, 0.0),
        ("both_ankle", 0, -0.30, 0.30, 0.0), ("both_shoulder", 0, -0.60, 0.70, 0.2),
        ("both_elbow", 0, -0.50, 0.20, 0.2), ("spine", 0, 0.20, -0.15, 0.0),
    ),
    "idle": (
        ("spine", 2, 0.0, 0.03, 0.0), ("chest", 0, 0.0, 0.04, 0.0), ("head", 1, 0.0, 0.25, 0.0),
        ("both_shoulder", 0, 0.05, 0.08, 0.5), ("both_elbow", 0, -0.15, 0.08, 0.5),
    ),
}  # fmt: skip


def _table() -> np.ndarray:
    """Return the middle, swing and lag for each theme, joint and axis: (3, 5, 25, 3)."""
    table = np.zeros((3, len(THEMES), JOINTS, 3))
    for theme, turns in enumerate(_TURNS.values()):
        for name, axis, *turn in turns:
            side, _, joint = name.rpartition("_")
            sides = ("right", "left") if side in ("both", "step") else (side,)
            for each in sides:
                at = NAMES.index(f"{each}_{joint}" if each else joint)
                table[:, theme, at, axis] = turn
                table[2, theme, at, axis] += np.pi if side == "step" and each == "left" else 0.0
    return table


MIDDLES, SWINGS, LAGS = _table()


@dataclass
class Scene:
    """The random values of a scene; for many scenes, each value has a first axis of scenes."""

    theme: Any  # which of THEMES
    tempo: Any  # beats a second
    amplitude: Any  # how far joints swing, of what is usual
    phase: Any  # where in the beat it begins
    heading: Any  # the direction it goes
    start: Any  # where on the floor it begins: (2,)
    style: Any  # how far each joint swings about each axis, of what is usual: (25, 3)
    posture: Any  # by how much each is turned besides: (25, 3)


def generate_random_scene(rng: Any) -> Scene:
    """Draw a scene of a generator, or many scenes of the generators that fastpipe gives a batch."""
    return Scene(
        theme=rng.integers(len(THEMES)),
        tempo=rng.uniform(0.5, 1.6),
        amplitude=rng.uniform(0.3, 1.3),
        phase=rng.uniform(0, 2 * np.pi),
        heading=rng.uniform(-np.pi, np.pi),
        start=rng.uniform(-2, 2, size=2),
        style=rng.uniform(0.2, 1.8, size=(JOINTS, 3)),
        posture=rng.uniform(-0.3, 0.3, size=(JOINTS, 3)),
    )


def rotation(x: Any, y: Any, z: Any) -> Any:
    """The matrix that turns about the three axes, of numbers or of arrays: its rows."""
    sx, cx, sy, cy, sz, cz = np.sin(x), np.cos(x), np.sin(y), np.cos(y), np.sin(z), np.cos(z)
    return (
        (cy * cz, sx * sy * cz - cx * sz, cx * sy * cz + sx * sz),
        (cy * sz, sx * sy * sz + cx * cz, cx * sy * sz - sx * cz),
        (-sy, sx * cy, cx * cy),
    )


def product(a: Any, b: Any) -> Any:
    """The product of two matrices of numbers or of arrays."""
    return tuple(
        tuple(row[0] * b[0][at] + row[1] * b[1][at] + row[2] * b[2][at] for at in range(3)) for row in a
    )


class Actor:
    """Plays a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def get_pose(self, t: float) -> np.ndarray:
        """The places of all joints at a time: (25, 3)."""
        scene = self.scene
        beat = 2 * np.pi * scene.tempo * t + scene.phase
        places, turns = [], []
        for joint, parent in enumerate(PARENTS):
            angles = []
            for axis in range(3):
                middle = MIDDLES[scene.theme, joint, axis] + scene.posture[joint, axis]
                swing = SWINGS[scene.theme, joint, axis] * scene.amplitude * scene.style[joint, axis]
                angles.append(middle + swing * np.sin(beat - LAGS[scene.theme, joint, axis]))
            x, y, z = OFFSETS[joint]
            if parent is None:
                way = SPEEDS[scene.theme] * scene.tempo * t
                up = np.sin(2 * beat)
                if up < 0:  # on the floor
                    up = 0.0
                angles[1] = angles[1] + scene.heading
                place = (
                    scene.start[0] + way * np.sin(scene.heading),
                    y + BOUNCES[scene.theme] * scene.amplitude * up,
                    scene.start[1] + way * np.cos(scene.heading),
                )
                turn = rotation(*angles)
            else:
                place = tuple(
                    at + (row[0] * x + row[1] * y + row[2] * z)
                    for at, row in zip(places[parent], turns[parent], strict=True)
                )
                turn = product(turns[parent], rotation(*angles))
            places.append(place)
            turns.append(turn)
        return np.array(places)


def get_poses(scene: Scene) -> np.ndarray:
    """The places of all joints in all frames of many scenes: float32 (B, 250, 25, 3).

    They are those of ``get_pose`` to the last bit, as the operations are the same, in the same order.
    """
    times = np.arange(FRAMES) * FRAME  # (250,); with scenes' values, (B, 1), they make (B, 250)
    tempo, amplitude, phase, heading = (
        one[:, None] for one in (scene.tempo, scene.amplitude, scene.phase, scene.heading)
    )
    beat = 2 * np.pi * tempo * times + phase
    found = np.empty((len(scene.theme), FRAMES, JOINTS, 3), np.float32)
    places, turns = [], []
    for joint, parent in enumerate(PARENTS):
        angles = []
        for axis in range(3):
            middle = MIDDLES[scene.theme, joint, axis] + scene.posture[:, joint, axis]
            swing = SWINGS[scene.theme, joint, axis] * scene.amplitude * scene.style[:, joint, axis]
            lag = LAGS[scene.theme, joint, axis]
            angles.append(middle[:, None] + swing[:, None] * np.sin(beat - lag[:, None]))
        x, y, z = OFFSETS[joint]
        if parent is None:
            way = SPEEDS[scene.theme][:, None] * tempo * times
            up = np.maximum(np.sin(2 * beat), 0.0)
            angles[1] = angles[1] + heading
            place = (
                scene.start[:, 0, None] + way * np.sin(heading),
                y + BOUNCES[scene.theme][:, None] * amplitude * up,
                scene.start[:, 1, None] + way * np.cos(heading),
            )
            turn = rotation(*angles)
        else:
            place = tuple(
                at + (row[0] * x + row[1] * y + row[2] * z)
                for at, row in zip(places[parent], turns[parent], strict=True)
            )
            turn = product(turns[parent], rotation(*angles))
        places.append(place)
        turns.append(turn)
        for axis in range(3):
            found[:, :, joint, axis] = place[axis]
    return found
