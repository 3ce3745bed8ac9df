"""To which stage of an input pipeline a function belongs: by the package that it is of."""

from __future__ import annotations

__all__ = ["COLLATE", "DECODE", "GRAPH", "OTHER", "READ", "STAGES", "TRANSFER", "TRANSFORM", "stage_of"]

READ, DECODE, TRANSFORM, COLLATE, TRANSFER = "read", "decode", "transform", "collate", "transfer"
OTHER = "other"  # the script's own code, which calls nothing that is known
GRAPH = "graph"  # TensorFlow's own operations
STAGES = (READ, DECODE, TRANSFORM, COLLATE, TRANSFER, GRAPH, OTHER)

_IMAGE_READERS = frozenset({
    "open", "load", "convert", "draft", "verify", "seek", "frombytes", "frombuffer", "load_prepare",
    "_getdecoder", "preinit", "init", "getmodebase",
})  # fmt: skip

# By the longest prefix of a dotted name.
_PREFIXES: dict[str, str] = {
    **dict.fromkeys((
        "_io", "io.open", "builtins.open", "os", "posix", "mmap", "socket", "ssl", "select", "selectors",
        "http", "urllib", "urllib3", "requests", "aiohttp", "botocore", "boto3", "s3fs", "s3torchconnector",
        "fsspec", "gcsfs", "adlfs", "obstore", "h5py", "netCDF4", "tensorstore", "zarr.storage", "lmdb",
        "pyarrow", "pathlib.Path", "numpy.lib.format", "numpy.lib._format_impl", "numpy.lib.npyio",
        "numpy.lib._npyio_impl", "numpy.load", "numpy.fromfile", "numpy.memmap", "nibabel", "asyncio",
        "webdataset", "shutil", "torch.load", "torch.serialization",
    ), READ),
    **dict.fromkeys((
        "PIL", "simplejpeg", "turbojpeg", "nvidia", "torchvision.io", "torchcodec", "imageio", "imagecodecs",
        "cv2.imread", "cv2.imdecode", "skimage.io", "soundfile", "audioread", "librosa.load",
        "librosa.core.audio", "torchaudio.load", "torchaudio._backend", "scipy.io", "av", "decord", "zlib",
        "gzip", "bz2", "lzma", "zipfile", "tarfile",
        "blosc", "blosc2", "numcodecs", "zarr", "zstandard", "zstd", "lz4", "pickle", "_pickle", "json",
        "tifffile", "pandas", "csv", "_csv", "pydicom", "SimpleITK", "base64", "binascii",
    ), DECODE),
    **dict.fromkeys((
        "torchvision.transforms", "torchvision.tv_tensors", "torchvision.ops", "albumentations", "kornia",
        "monai", "torchio", "batchgenerators", "batchgeneratorsv2", "imgaug", "scipy", "skimage", "cv2",
        "numpy", "torch", "torchaudio", "librosa", "numba", "PIL.ImageOps", "PIL.ImageEnhance",
        "PIL.ImageFilter", "PIL.ImageDraw", "PIL.ImageChops", "random", "math", "statistics", "transformers",
        "tokenizers",
    ), TRANSFORM),
    **dict.fromkeys(("torch.utils.data._utils.collate", "torch.utils.data._utils.fetch"), COLLATE),
    **dict.fromkeys((
        "multiprocessing", "torch.multiprocessing", "torch.utils.data._utils.pin_memory",
        "torch.utils.data._utils.worker",
    ), TRANSFER),
}  # fmt: skip


def stage_of(name: str) -> str | None:
    """The stage of a function.

    Args:
        name: dotted: of its module, and of what it is called there.

    Returns:
        The stage; None if nothing is known of it.

    >>> stage_of("PIL.JpegImagePlugin.JpegImageFile.load_prepare"), stage_of("PIL.Image.Image.resize")
    ('decode', 'transform')
    >>> stage_of("h5py._hl.dataset.Dataset.__getitem__"), stage_of("before.Segments.__getitem__")
    ('read', None)
    """
    if name.startswith("PIL.Image."):  # one module opens, decodes and resamples
        return DECODE if name.rpartition(".")[2] in _IMAGE_READERS else TRANSFORM
    while name:
        found = _PREFIXES.get(name)
        if found is not None:
            return found
        name = name.rpartition(".")[0]
    return None
