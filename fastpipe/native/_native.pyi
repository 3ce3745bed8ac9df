"""fastpipe's native core: see fastpipe/native/README.md."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def change_motion(source: NDArray[numpy.generic], source_type: int, out: NDArray[numpy.generic], out_type: int, speeds: NDArray[numpy.float64], scales: NDArray[numpy.float64], shifts: NDArray[numpy.float64], order: NDArray[numpy.int64], lengths: NDArray[numpy.int64] | None, new_lengths: NDArray[numpy.int64], threads: int) -> None:
    """
    Play sequences at other speeds, and map their frames: see augment_motion.h.  Types are 0 for float32, 1 for float16 and 2 for bfloat16.
    """

class Channel:
    """Bounds how many threads are busy with the jobs of one owner."""

    def __init__(self, limit: int) -> None: ...

class Batch:
    """What the engine makes: a batch of images, of rows."""

def submit(batch: Batch, channel: Channel, threads: int) -> int:
    """
    Begin a batch in the process's threads; its number.  0: no thread can be had.
    """

def run_here(batch: Batch) -> None:
    """Make a batch in the calling thread."""

def run_in_threads(batch: Batch, threads: int) -> None:
    """
    Make a batch in so many threads, of which the calling one is one; it is made when this returns.
    """

def cancel(job: int) -> None:
    """
    Begin no further item of a job.  Its event `done` comes when those that run are.
    """

def watch_begun(job: int) -> bool:
    """
    Whether all items of a job are begun; where they are not, its event `begun` comes as soon as they are.
    """

def next_event(milliseconds: int) -> tuple[int, int]:
    """
    Wait for an event: its job, and 0 for none yet, 1 where all items of a job that is watched are begun, 2 where the job is done, 3 where the engine has stopped.
    """

def stop(milliseconds: int) -> bool:
    """
    Cancel all jobs and end the threads; whether they have ended within that time.
    """

def threads() -> int:
    """The threads that there are."""

def set_niceness(niceness: int) -> None:
    """
    How much threads that start from now on step back for others, as of nice(2).
    """

def note_in(lines: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Have each thread note the path of the file that it is at in one of these lines, with a zero at its end.
    """

def simulate_decoding(nanoseconds: int) -> None:
    """For benchmarks: wait in the place of decoding; 0 decodes."""

def level() -> int:
    """The instruction set in use: 0, 1 (AVX2), 2 (AVX-512)."""

def force_level(level: int) -> bool:
    """
    For tests: use an instruction set from now on; whether the processor has it.
    """

class AugmentPlan:
    """
    A chain of augmentations of images or spectrograms: AugmentPlan in augment.h.
    """

    def __init__(self, steps: Sequence[tuple[str, int, Sequence[int], Sequence[float]]], columns: int) -> None: ...

class AugmentBatch(Batch):
    """Images that a plan changes, each by a row of numbers."""

    @property
    def problem(self) -> tuple[int, int]:
        """
        What went wrong with one of the images, and its number: 0 nothing, 1 there is no memory, 2 its numbers are of pixels that it does not have.
        """

    def change(self, number: int, image: NDArray[numpy.generic]) -> int:
        """Change one of the images, given here; as of `problem`."""

def augment_batch(plan: AugmentPlan, rows: NDArray[numpy.float64], source: NDArray[numpy.generic] | None, element: str, out: NDArray[numpy.generic], out_element: str, shape: Sequence[int] = (0, 0, 0), places: NDArray[numpy.int64] | None = None) -> AugmentBatch:
    """
    A batch (N, C, H, W) to be changed.  rows: (N, columns).  source: None where images of `shape` are given one by one.  places: which of `out` each image becomes.
    """

class VolumePlan:
    """What is done with volumes of a shape and a dtype: see Step."""

    def __init__(self, steps: Sequence[tuple[str, int, Sequence[int], Sequence[float]]], shape: Sequence[int], dtype: str, dtype_after: str) -> None: ...

def augment_volumes(plan: VolumePlan, source: NDArray[numpy.generic], table: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], goal: NDArray[numpy.generic], threads: int) -> None:
    """
    Change volumes by a table with the numbers of each, in so many threads.  bfloat16 is given as int16.
    """

class EntryTable:
    """The records of a cache's log: see fastpipe/native/entries.h."""

    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    def find(self, digest: bytes) -> tuple[int, int, int, tuple[int, int, int], int, int, int] | None:
        """
        An entry's number, offset, bytes, shape, flags, sum, and bytes of its note.
        """

    def extend(self, log: bytes) -> int:
        """
        Add the records that follow; the first byte of the data file that none of them has.
        """

    def forget(self, number: int) -> None:
        """Never find an entry again."""

    def is_verified(self, number: int) -> bool:
        """Whether an entry's bytes have been compared with their sum."""

    def note_verified(self, number: int) -> None:
        """Note that they have."""

    def entries(self) -> list[tuple[int, int, int, tuple[int, int, int], int, int, int]]:
        """All entries, as of ``find``."""

def pack_records(digests: bytes, offset: int, step: int, nbytes: int, shape: tuple[int, int, int], flags: int, sums: Sequence[int], note: int) -> bytes:
    """
    Records of entries of the same shape, the first at `offset`, each `step` bytes behind the one before.
    """

def sum_of(bytes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """The sum by which bytes are compared with those that were kept."""

def kept_chunks(table: EntryTable, descriptor: int, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, size: int, tag: bytes, verifies: bool, marks: int, chunks: int, nbytes: int, owner: object) -> KeptChunks:
    """
    Where decoded chunks of a dataset are kept; nbytes: of each; owner: lives as long, and closes the descriptor.
    """

class KeptImages:
    """Where a batch looks for decoded images: see fastpipe/native/kept.h."""

    def __init__(self, table: EntryTable, descriptor: int, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, size: int, tag: bytes, verifies: bool, marks: int, form: int, owner: object) -> None:
        """
        form: of KeptForm; owner: lives as long as this, and closes the descriptor.
        """

    def have(self, states: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> list[bool]:
        """
        Whether the images of objects in these states, uint64 (N, 5), can be made without their files.
        """

class LentFile:
    """A file that is open until it is given back."""

    @property
    def descriptor(self) -> int:
        """Its descriptor, for ``os.pread``."""

    def give_back(self) -> None:
        """Let it be closed."""

class DataFile:
    """A file of which parts are read: see fastpipe/native/files.h."""

    def lend(self) -> LentFile:
        """
        The file, open; an OSError where it is not to be opened, ESTALE where it has changed.
        """

def close_idle_files() -> int:
    """Close files that are open only to be read again; how many."""

def data_file(path: bytes, state: tuple[int, int, int, int]) -> DataFile:
    """
    A file by its encoded path, in a state: device, inode, bytes, nanoseconds of its modification.
    """

class KeptChunks:
    """
    Where decoded chunks of a dataset are kept: see fastpipe/native/kept.h.
    """

    def find(self, chunk: int) -> int:
        """
        Where a chunk begins in the store's data file; -1 where it is not kept.
        """

class ChunkedDataset:
    """A dataset of an HDF5 file: see fastpipe/native/chunks.h."""

    def __init__(self, file: DataFile, shape: Sequence[int], chunk: Sequence[int], itemsize: int, sample_dims: int, filters: Sequence[tuple[int, int, int, int]], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], masks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], fill: bytes, inside: bytes | None = None, memory: UnitMemory | None = None, first_key: int = 0, kept: KeptChunks | None = None) -> None: ...

    def decode(self, numbers: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')]) -> int:
        """
        Read and decode chunks into uint8 (N, bytes of a chunk); how many, before the first that is declined.
        """

class RowBatch(Batch):
    """A batch of rows that is read."""

    @property
    def times(self) -> tuple[int, int, int]:
        """Nanoseconds of reading, decoding and copying, summed over its tasks."""

    @property
    def counted(self) -> tuple[int, int]:
        """
        Bytes of chunks that were decoded, and of those the share whose rows were taken.
        """

    @property
    def is_complete(self) -> bool:
        """Whether all of its tasks were done."""

    @property
    def has_chunks(self) -> bool:
        """Whether there are chunks that are to be kept."""

    def take_chunks(self) -> list[tuple[int, int, NDArray[numpy.uint8]]]:
        """
        Chunks that are to be kept, once: the number of their source, their own, and uint8 (N,).
        """

def row_batch(sources: list[object], statuses: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], threads: int, turn: float = 0.0, most_keep_nbytes: int = 0) -> RowBatch:
    """
    A batch of rows: of each source a dataset, samples, their rows or None, memory, uint8 (N,), and the row with which it begins.
    """

def use_blosc2(calls: Sequence[int]) -> None:
    """
    Hand over the addresses of c-blosc2's functions: see fastpipe/native/codecs.h.
    """

def undo_filter(step: tuple[int, int, int, int], stored: bytes, nbytes: int) -> NDArray[numpy.uint8] | int:
    """
    The bytes of a chunk without one of its filters, uint8 (nbytes,); or the number of what is wrong with them.
    """

class Step:
    """One step of a transform: see fastpipe/native/geometry.h."""

    def __init__(self) -> None: ...

    @property
    def kind(self) -> int: ...

    @kind.setter
    def kind(self, arg: int, /) -> None: ...

    @property
    def draw(self) -> int: ...

    @draw.setter
    def draw(self, arg: int, /) -> None: ...

    @property
    def size(self) -> list[int]: ...

    @size.setter
    def size(self, arg: Sequence[int], /) -> None: ...

    @property
    def filter(self) -> int: ...

    @filter.setter
    def filter(self, arg: int, /) -> None: ...

    @property
    def order(self) -> int: ...

    @order.setter
    def order(self, arg: int, /) -> None: ...

    @property
    def scale(self) -> list[float]: ...

    @scale.setter
    def scale(self, arg: Sequence[float], /) -> None: ...

    @property
    def ratio(self) -> list[float]: ...

    @ratio.setter
    def ratio(self, arg: Sequence[float], /) -> None: ...

    @property
    def max_size(self) -> int: ...

    @max_size.setter
    def max_size(self, arg: int, /) -> None: ...

    @property
    def padding(self) -> list[int]: ...

    @padding.setter
    def padding(self, arg: Sequence[int], /) -> None: ...

    @property
    def pad_if_needed(self) -> bool: ...

    @pad_if_needed.setter
    def pad_if_needed(self, arg: bool, /) -> None: ...

    @property
    def may_pad(self) -> bool: ...

    @may_pad.setter
    def may_pad(self, arg: bool, /) -> None: ...

    @property
    def always_pads(self) -> bool: ...

    @always_pads.setter
    def always_pads(self, arg: bool, /) -> None: ...

    @property
    def fill_by_channel(self) -> bool: ...

    @fill_by_channel.setter
    def fill_by_channel(self, arg: bool, /) -> None: ...

    @property
    def has_fill(self) -> bool: ...

    @has_fill.setter
    def has_fill(self, arg: bool, /) -> None: ...

    @property
    def fill(self) -> list[int]: ...

    @fill.setter
    def fill(self, arg: Sequence[int], /) -> None: ...

    @property
    def probability(self) -> float: ...

    @probability.setter
    def probability(self, arg: float, /) -> None: ...

    @property
    def horizontal(self) -> bool: ...

    @horizontal.setter
    def horizontal(self, arg: bool, /) -> None: ...

    @property
    def channels(self) -> int: ...

    @channels.setter
    def channels(self, arg: int, /) -> None: ...

    @property
    def is_relative(self) -> bool: ...

    @is_relative.setter
    def is_relative(self, arg: bool, /) -> None: ...

    @property
    def outside(self) -> int: ...

    @outside.setter
    def outside(self, arg: int, /) -> None: ...

    @property
    def pads(self) -> bool: ...

    @pads.setter
    def pads(self, arg: bool, /) -> None: ...

class Conversion:
    """What becomes of an image's bytes: see fastpipe/native/resample.h."""

    def __init__(self, arg: int, /) -> None: ...

def conversion(kind: int, channels: int, interleaved: bool, word: int, divide: bool, mean: Sequence[float], std: Sequence[float], table: bytes) -> Conversion:
    """
    A conversion: kind 0 leaves bytes, 1 computes float32, 2 looks up elements of `word` bytes.
    """

class ImagePlan:
    """What is done to each image of a batch."""

    def __init__(self, steps: Sequence[Step], conversion: Conversion, draws: int, max_pixels: int = -1, turns: bool = False, scaled: bool = False, shrink: Sequence[Step] = [], parity: int = 0, scaling: tuple[int, float, float] = (0, 1.0, 0.0), keeps_samples: bool = False, reads_png: bool = False) -> None: ...

class ImageBatch(Batch):
    """A batch of images that is made."""

    def take_image(self, item: int) -> tuple[NDArray[numpy.uint8], int, int]:
        """
        An image that was made into memory of its own, once: uint8 (bytes,), height, width.
        """

    def take_file(self, item: int) -> bytes:
        """The encoded file of such an image, once."""

    @property
    def times(self) -> tuple[int, int, int]:
        """
        Nanoseconds of reading, decoding and transforming, summed over samples.
        """

    @property
    def seen(self) -> tuple[int, int, int]:
        """
        Images whose sizes are known, their pixels in all, and about how many bytes their coefficients take.
        """

    @property
    def whole(self) -> list[int]:
        """The images whose whole pixels are to be kept."""

    def take_whole(self, item: int) -> tuple[bytes, bytes, NDArray[numpy.uint8], int]:
        """
        Such an image, once: its digest, its file's state, uint8 (H, W, bytes of a pixel), or an entry as (1, N, 1), and the pixels of its file.
        """

def fold(steps: Sequence[Step], height: int, width: int, parameters: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int], tuple[int, int], tuple[int, int, int], tuple[int, int], int, bool, tuple[int, int, int, int], tuple[bool, bool], tuple[bool, bool], int, int] | None:
    """
    The region that steps come to: the fields of fastpipe/native/geometry.h in their order, boxes and sizes as tuples; None where fold() gives false.
    """

def image_batch(plan: ImagePlan, prefix: bytes, arena: bytes, starts: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], ends: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], parameters: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)], memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')] | None, places: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Sequence[int], keeps_files: bool, statuses: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], inputs: list[object] | None, kept: KeptImages | None = None, states: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, most_nbytes: int = 0, then: AugmentBatch | None = None) -> ImageBatch:
    """A batch of images: see ImageBatch in fastpipe/native/images.h."""

def read_jpeg_header(file: object) -> tuple[int, int, bool, int]:
    """Height, width, whether it is trusted, orientation."""

def decode(file: object, top: int, left: int, height: int, width: int, kind: int = 0) -> NDArray[numpy.uint8] | None:
    """
    A part of a trusted JPEG, uint8 (height, width, C); None where it is declined.  Kind 0: Pillow's RGB, 1: TensorFlow's, 2: TensorFlow's grey.
    """

def resize_as_tensorflow(pixels: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], parity: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
    """
    tf.image.resize() without antialiasing: uint8 (h, w, C) to float32 (H, W, C).
    """

def decode_reduced(file: object, factor: int, count: int) -> NDArray[numpy.uint8] | None:
    """
    At least so many rows of a trusted JPEG at a part of its size; None where it is declined.
    """

def make_axis(filter: int, in_size: int, out_size: int, first: int, length: int, turned: bool, mirrored: bool, start8: int, extent8: int) -> tuple[int, int, int, int, int, int, bool, bool, int, int, int]:
    """An axis of a resize: the fields of Axis."""

def axis_table(filter: int, axis: tuple[int, int, int, int, int, int, bool, bool, int, int, int], table: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Write starts, taps and weights of an axis."""

def png_rows(file: object) -> NDArray[numpy.uint8] | None:
    """
    The rows of a PNG as it stores them, (H, bytes, 1); None if it is not a complete, still, not interlaced PNG.
    """

def probe_jpeg(file: object) -> int:
    """
    1 if a trusted JPEG can be decoded later without an error, 2 if that depends on its scans, which have to be read, 0 if it is declined.
    """

def draw_jpeg(file: object, steps: Sequence[Step], parameters: NDArray[numpy.float64]) -> NDArray[numpy.uint8] | None:
    """
    What steps make of a trusted JPEG, uint8 (H, W, 3); None where it is declined.
    """

def draw_pixels(pixels: NDArray[numpy.uint8], steps: Sequence[Step], parameters: NDArray[numpy.float64]) -> NDArray[numpy.uint8] | None:
    """What steps make of an image, uint8 (H, W, 3), likewise."""

def resample(pixels: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), device='cpu', writable=False)], filter: int, x: tuple[int, int, int, int, int, int, bool, bool, int, int, int], y: tuple[int, int, int, int, int, int, bool, bool, int, int, int], vertical_first: bool, grey: int, conversion: Conversion, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Resample and convert pixels into memory."""

class OpenArchives:
    """While there is one, archives stay open: see fastpipe/native/files.h."""

    def __init__(self) -> None: ...

def read_files(paths: list[bytes]) -> list[tuple[bytes, tuple[int, int, bool, int]] | None]:
    """
    Of each file, by its encoded path, its content and what read_jpeg_header() gives; None where it is unreadable.
    """

def jpeg_version() -> str:
    """The version of libjpeg-turbo."""

def coefficients_version() -> int:
    """
    The version of the form in which coefficients are kept: see fastpipe/native/coefficients.h.
    """

def skip_resampling(skips: bool) -> None:
    """For benchmarks: images are read and decoded only."""

class VolumeSource:
    """Where the bytes of a volume are: see VolumeSource in volume.h."""

    def swap(self, word: int) -> VolumeSource:
        """The same with numbers of so many bytes turned around."""

    def scale(self, number: str, slope: float, intercept: float, scaled: str = 'f8', bits: int = 64) -> VolumeSource:
        """
        The same with elements scaled to float64, or integers to others of up to 32 bits; types are as NumPy has them; bits: of an integer, how many count.
        """

    def copy_of(self, path: bytes, state: tuple[int, int, int, int]) -> VolumeSource:
        """The same as a copy of another file."""

def volume_in_memory(array: object) -> VolumeSource:
    """An array; the memory is kept."""

def volume_in_file(path: bytes, state: tuple[int, int, int, int], itemsize: int, offset: int, steps: Sequence[int]) -> VolumeSource:
    """
    An array that lies in a file as it is; state: its device, inode, bytes and time of modification in ns; steps: bytes from one element to the next, below 0 where the order is reversed.
    """

def volume_in_pieces(pieces: Sequence[tuple[bytes, tuple[int, int, int, int], int]], piece_nbytes: int, itemsize: int, steps: Sequence[int]) -> VolumeSource:
    """
    An array that lies in several files as it is; pieces: path, state and first byte of each; piece_nbytes: bytes of it in each file.
    """

def volume_in_files(folder: bytes, metadata: bytes, prefix: str, separator: str, shape: Sequence[int], chunk: Sequence[int], itemsize: int, codec: str, fill: bytes) -> VolumeSource:
    """An array each of whose chunks is a file."""

def volume_in_segments(path: bytes, state: tuple[int, int, int, int], shape: Sequence[int], chunk: Sequence[int], itemsize: int, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], masks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, filters: Sequence[tuple[int, int, int, int]], fill: bytes, is_clipped: bool = False) -> VolumeSource:
    """
    An array whose chunks are parts of a file; filters: number, element, codec and block of each.
    """

def decode_chunk(codec: str, stored: object, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    Undo the codec of a whole chunk; 0, or the number of a Problem of codecs.h.
    """

class Volume:
    """An array that is read in units: see volume.h."""

    def __init__(self, shape: Sequence[int], unit: Sequence[int], itemsize: int, source: VolumeSource, units: object | None, first_key: int) -> None: ...

class PatchKind:
    """One of a sample's values, in all patches: see patches.h."""

    def __init__(self, size: Sequence[int], dims: int, itemsize: int, padding: int, constant: bytes, nan: int, word: int, number: bytes) -> None: ...

class PatchBatch(Batch):
    """A batch of patches that is read."""

    @property
    def is_complete(self) -> bool:
        """Whether all of it was done; False of one that was cancelled."""

    @property
    def times(self) -> tuple[int, int]:
        """
        Nanoseconds of decoding, with reading, and of copying, summed over patches.
        """

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of units that were decoded, and of patches that were copied."""

def patch_batch(kinds: list[object], outs: list[object], volumes: list[object], starts: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], statuses: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')]) -> PatchBatch:
    """
    A batch of patches: see PatchBatch in patches.h.  volumes: patch by patch, None where Python reads.
    """

def touched_units(firsts: NDArray[numpy.int64], lows: NDArray[numpy.int64], counts: NDArray[numpy.int64], steps: NDArray[numpy.int64]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """
    The units that patches touch, patch after patch, and where each patch's end: see tours.h.
    """

def decoded_units(units: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], ends: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], visits: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], held: int, most: int) -> int:
    """
    How many units are decoded for patches that come one after the other: see tours.h.
    """

class FoundUnit:
    """A unit that is there; nothing overwrites it until it is released."""

    @property
    def memory(self) -> NDArray[numpy.uint8]:
        """uint8 (slot_nbytes,); to be read only."""

    def release(self) -> bool:
        """Let go of it; whether it was what it should be all the time."""

class ClaimedUnit:
    """A slot to decode a unit into; given back with this object."""

    @property
    def memory(self) -> NDArray[numpy.uint8]:
        """uint8 (slot_nbytes,), aligned to 64."""

    def publish(self, left: int = -1) -> bool:
        """
        Let others see the unit, which will be used so often yet; -1: not known.
        """

    def abandon(self) -> None:
        """Give the slot back."""

class UnitMemory:
    """
    Decoded parts of arrays that are remembered: see fastpipe/native/units.h.
    """

    def __init__(self, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], descriptor: int, keys: int, slots: int, slot_nbytes: int) -> None: ...

    @staticmethod
    def nbytes(keys: int, slots: int, slot_nbytes: int) -> int:
        """Bytes of the memory that it takes."""

    @property
    def slot_nbytes(self) -> int:
        """Of each slot."""

    @property
    def slots(self) -> int:
        """How many there are."""

    def find(self, key: int) -> FoundUnit | None:
        """Look for a unit."""

    def claim(self, key: int) -> ClaimedUnit | None:
        """
        A slot to decode a unit into; None where somebody decodes it, or has just done so, or there is no room.
        """

    def are_there(self, keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], or_coming: bool = False) -> NDArray[numpy.bool_]:
        """
        Whether each of some units, int64 (N,), is there, or is being decoded: bool (N,).
        """

    def is_coming(self, key: int) -> bool:
        """
        Whether somebody is decoding a unit, or was when the process ended that did so.
        """

    def wait(self, key: int) -> None:
        """Wait while somebody is decoding a unit, but not for long."""

    def used(self, keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Hear that units were used: those that will not be again make room first.
        """

    def expect(self, what: int, keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], is_in_order: bool = False) -> None:
        """
        Hear which units will be used, int64 (N,), each as often as it is there; what: a number from 1 for these uses, such as an epoch's; is_in_order: whether this process uses them one after the other.
        """

    @property
    def expected(self) -> int:
        """What was said last; 0 for nothing."""

    @property
    def is_over(self) -> bool:
        """Whether nearly all of the expected uses have been."""

    def count(self, decoded: int, copied: int) -> None:
        """
        Count bytes that were decoded, and bytes that were copied of them, for all processes.
        """

    @property
    def decoded(self) -> int:
        """Bytes that were decoded so far, in all processes."""

    @property
    def copied(self) -> int:
        """Bytes that were copied of them."""
