"""A source whose disk fails once."""


def tired_at_first(source):
    """The same source; the first file that is read cannot be."""
    read = source.read

    def fail(key):
        source.read = read
        raise OSError("the disk is tired")

    source.read = fail
    return source
