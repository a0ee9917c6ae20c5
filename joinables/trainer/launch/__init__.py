"""Running one function on all ranks: processes that are started here, or were started by others."""
