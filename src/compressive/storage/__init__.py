"""Object storage: ranged reads through a bounded local cache, and mirrors of run folders."""
