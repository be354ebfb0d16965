"""Make a data source fail once, as a disk with a read error does."""


def fail_first_read(source):
    """Return the source, changed so that its first read raises OSError."""
    read = source.read

    def fail(key):
        source.read = read
        raise OSError("read error")

    source.read = fail
    return source
