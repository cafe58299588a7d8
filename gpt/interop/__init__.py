"""Models in the files of other projects."""
