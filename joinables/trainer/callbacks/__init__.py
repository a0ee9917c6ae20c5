"""Callbacks: objects that a trainer calls during a run; their base class, and those that come with the trainer."""
