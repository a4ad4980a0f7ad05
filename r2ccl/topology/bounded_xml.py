"""Reads XML of strangers: bounded in size, depth and number of elements, without document types.

Knows nothing of what the XML means. Invariant: without a document type there are no entities to
expand and no files to fetch, so what is read is what was given.

References
----------
defusedxml's documentation, "Attack vectors": entity expansion, external entities, retrieval of
document types.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from r2ccl.errors import InvalidArgument

#: A machine of 256 GPUs and NICs takes some 100 KB and 2,000 elements, 10 deep.
MAX_NBYTES = 4 << 20
MAX_ELEMENTS = 16_384
MAX_DEPTH = 64


def parse_bounded(data: bytes) -> ET.Element:
    """Return the root element of a document in UTF-8.

    Raises
    ------
    InvalidArgument
        It is none, has a document type, or exceeds a bound.
    """
    if len(data) > MAX_NBYTES:
        raise InvalidArgument(
            f"topology XML of more than {MAX_NBYTES} bytes: pass that of one host"
        )
    try:
        text = data.decode("utf-8-sig")
        # References to entities need a document type that declares them.
        if "<!DOCTYPE" in text:
            raise InvalidArgument("topology XML with a document type: take <!DOCTYPE ...> out")
        parser = ET.XMLParser(target=_Bounded())
        parser.feed(text)
        root: ET.Element = parser.close()
    except (UnicodeDecodeError, ET.ParseError) as exc:
        raise InvalidArgument(f"topology file that is no XML in UTF-8 ({exc}): correct it") from exc
    return root


class _Bounded(ET.TreeBuilder):
    """Builds the tree, unless it is too deep or has too many elements."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._count = 0

    def start(self, tag: str, attrs: dict[str, str], /) -> ET.Element:
        """Begin an element."""
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > MAX_ELEMENTS:
            raise InvalidArgument(
                f"topology XML with more than {MAX_ELEMENTS} elements, or {MAX_DEPTH} within each "
                "other: pass the file of one host"
            )
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ET.Element:
        """End an element."""
        self._depth -= 1
        return super().end(tag)


__all__ = ["MAX_DEPTH", "MAX_ELEMENTS", "MAX_NBYTES", "parse_bounded"]
