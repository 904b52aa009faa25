"""kvpack: blocks of keys and values at rest, named by what they were computed from, in memory and on disk."""
