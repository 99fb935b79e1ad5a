"""An S3 server that the tests of a file share."""

from collections.abc import Iterator

import pytest
from s3_server import S3, create_bucket, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server() as s3:
        create_bucket(s3)
        yield s3
