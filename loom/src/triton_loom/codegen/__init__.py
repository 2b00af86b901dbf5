"""Translation of a TTIR module into C++. Start reading at `emit`, which lists the other modules."""
