"""Join inside training frameworks: one module for each, which imports it; this one imports nothing.

``joinables.integrations.lightning``: a strategy for Lightning's ``Trainer``; ``pip install 'joinables[lightning]'``.
"""
