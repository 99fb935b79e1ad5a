"""Open shards on object storage as a source."""

from compressive.data.shard_file import split_in_name
from compressive.data.shards import open_parquet, open_tar
from compressive.data.source import SPLITS, Source, choose_split
from compressive.storage.address import split_address
from compressive.storage.file_systems import Stored
from compressive.storage.remote_file import SUFFIXES, list_shards, open_files


def open_remote(place: str, split: str) -> Source:
    """Open a shard or a folder of shards, such as s3://BUCKET/FOLDER, as local ones are opened."""
    shards = list_shards(place, {"data", *SPLITS})
    for suffix, open_shards in zip(SUFFIXES, (open_parquet, open_tar), strict=True):
        if found := _by_split(place, [s for s in shards if s.path.lower().endswith(suffix)]):
            chosen = found[choose_split(split, found, place)]
            source = open_shards(place, open_files(place, chosen))
            if not len(source):
                raise ValueError(f"no images in the shards of {place}, split {split}")
            return source
    raise AssertionError


def _by_split(place: str, shards: list[Stored]) -> dict[str, list[Stored]]:
    """Return the shards of each split, which is in the name of a shard or of its folder."""
    found: dict[str, list[Stored]] = {}
    root = split_address(place)[1]
    for shard in shards:
        name = shard.path.rpartition("/")[2]
        if shard.path == root:  # a single shard is also the train split, whatever its name
            return {split: shards for split in ("train", split_in_name(name) or "train")}
        folder = f"/{shard.path.removeprefix(root)}".split("/")[-2]
        default = folder if folder.lower() in SPLITS else "train"
        found.setdefault(split_in_name(name) or default, []).append(shard)
    return found
