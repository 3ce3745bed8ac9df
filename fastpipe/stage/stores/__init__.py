"""Where objects are: buckets, by obstore or by fsspec, and folders; all of them are a ``protocols.Store``."""

from fastpipe.stage.stores.locations import Location
from fastpipe.stage.stores.opening import open_store
from fastpipe.stage.stores.retrying import Retries, RetryingStore
from fastpipe.stage.stores.secrets import StorageOptions

__all__ = ["Location", "Retries", "RetryingStore", "StorageOptions", "open_store"]
