"""What all text has to be before it is split, counted or printed."""


def well_formed(text: str) -> str:
    """The text with U+FFFD for every lone surrogate: half a character, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
