"""Files that a fit goes on from: written whole or not at all, and read only if nothing in them has changed."""
