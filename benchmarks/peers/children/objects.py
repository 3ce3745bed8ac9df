"""A bucket's objects in torch's DataLoader: boto3, Amazon's S3 connector, LitData's raw files."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.children.protocol import Batches, Job, PeerError, Stream

__all__ = ["stream"]


class _Photos(ABC):
    """Decodes and transforms; what brings bytes is made in each worker."""

    def __init__(self, job: Job) -> None:
        from torchvision import transforms

        self._job = job
        self._transform = transforms.Compose([
            transforms.RandomResizedCrop(job.side), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize(job.mean, job.std),
        ])  # fmt: skip
        self._client: Any = None

    def __len__(self) -> int:
        return len(self._job.files)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        return self._made(self._get(self._job.files[place]), place)

    def _made(self, data: bytes, place: int) -> tuple[Any, int]:
        from PIL import Image

        return self._transform(Image.open(io.BytesIO(data)).convert("RGB")), self._job.labels[place]

    @abstractmethod
    def _get(self, key: str) -> bytes:
        """An object."""


class _Boto3(_Photos):
    """``get_object`` for each photo."""

    def _get(self, key: str) -> bytes:
        import boto3

        options = self._job.options
        if self._client is None:
            self._client = boto3.client(
                "s3", endpoint_url=options["endpoint"], aws_access_key_id=options["key"],
                aws_secret_access_key=options["secret"], region_name="us-east-1",
            )  # fmt: skip
        found: bytes = self._client.get_object(Bucket=options["bucket"], Key=key)["Body"].read()
        return found


class _Connector(_Photos):
    """An ``S3MapDataset``, whose objects are read whole."""

    def _get(self, key: str) -> bytes:
        from s3torchconnector import S3ClientConfig, S3MapDataset

        options = self._job.options
        if self._client is None:
            self._client = S3MapDataset.from_objects(
                [f"s3://{options['bucket']}/{file}" for file in self._job.files], region="us-east-1",
                endpoint=options["endpoint"], s3client_config=S3ClientConfig(force_path_style=True),
            )  # fmt: skip
            self._places = {file: place for place, file in enumerate(self._job.files)}
        found: bytes = self._client[self._places[key]].read()
        return found


class _Raw(_Photos):
    """A ``StreamingRawDataset``, which fetches the objects of a batch side by side."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from litdata import StreamingRawDataset
        from litdata.streaming import downloader

        # It reads S3 by obstore, which wants to be told that there is no certificate, and has no option for
        # that.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        options = job.options
        self._raw: Any = StreamingRawDataset(
            f"s3://{options['bucket']}/{job.folder}",
            cache_dir=job.scratch,
            storage_options={"endpoint_url": options["endpoint"]},
        )
        self._numbers = {
            item.path.partition(f"{options['bucket']}/")[2]: n for n, item in enumerate(self._raw.items)
        }

    def __getitems__(self, places: Sequence[int]) -> list[tuple[Any, int]]:
        datas = self._raw.__getitems__([self._numbers[self._job.files[place]] for place in places])
        return [self._made(data, place) for data, place in zip(datas, places, strict=True)]

    def _get(self, key: str) -> bytes:
        found: bytes = self._raw[self._numbers[key]]
        return found


_KINDS: dict[str, tuple[type[_Photos], tuple[str, ...]]] = {
    "boto3": (_Boto3, ("boto3", "torch")),
    "connector": (_Connector, ("s3torchconnector", "torch")),
    "raw": (_Raw, ("litdata", "torch")),
}


def stream(job: Job) -> Stream:
    """Epochs of ``options["epoch"]`` samples, drawn without repetition.

    ``options["kind"]`` says whose they are, ``options["workers"]`` how many processes there are.

    Raises:
        PeerError: it cannot read the bucket.
    """
    import os

    from torch.utils.data import DataLoader, RandomSampler

    # Which all of them look at; there is no certificate on loopback.
    os.environ["AWS_ACCESS_KEY_ID"] = str(job.options["key"])
    os.environ["AWS_SECRET_ACCESS_KEY"] = str(job.options["secret"])
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    os.environ.pop("AWS_CA_BUNDLE", None)
    kind, packages = _KINDS[str(job.options["kind"])]
    try:
        dataset = kind(job)
    except Exception as error:  # whatever it stumbles over
        raise PeerError(f"cannot list the bucket: {type(error).__name__}: {error}") from None
    order = RandomSampler(dataset, num_samples=int(job.options["epoch"]))
    loader: Any = DataLoader(
        dataset, job.batch_size, sampler=order, num_workers=int(job.options["workers"]),  # type: ignore[arg-type]
        persistent_workers=True,
    )  # fmt: skip

    def batches() -> Batches:
        while True:
            epoch = iter(loader)
            try:
                yield from epoch
            finally:
                # What the workers were told to make, they make: whoever is measured next waits for its end.
                for _ in epoch:
                    pass

    return Stream(batches(), 0, packages, renewed=batches)
