"""The processes of a training: who numbers them, and how they start, meet and end together."""
