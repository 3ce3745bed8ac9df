"""Filters: constants of fastpipe/native/resample.h."""

__all__ = [
    "BICUBIC", "BILINEAR", "BOX", "HAMMING", "LANCZOS", "NARROW", "NEAREST", "NEAREST_FLOOR", "SHARP_BICUBIC",
    "SHARP_BILINEAR", "TORCH_BICUBIC", "TORCH_BILINEAR",
]  # fmt: skip

# A flag: weights of 16 bits, as torch and Pillow-SIMD have them, instead of Pillow's 22.
NARROW = 16
# Pillow's filters, which widen when they shrink an image (antialiasing) …
BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS = 0, 1, 2, 3, 4
# … which torch has as well …
TORCH_BILINEAR, TORCH_BICUBIC = BILINEAR | NARROW, BICUBIC | NARROW
# … the nearest pixel: to the centre (Pillow, NEAREST_EXACT) or rounded down (torch's "nearest") …
NEAREST, NEAREST_FLOOR = 5, 6
# … and torch's filters without antialiasing, which do not widen and repeat the edge.
SHARP_BILINEAR, SHARP_BICUBIC = 7 | NARROW, 8 | NARROW
