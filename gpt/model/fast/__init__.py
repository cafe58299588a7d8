"""Twins of the plain network that compute the same in less time or memory."""
