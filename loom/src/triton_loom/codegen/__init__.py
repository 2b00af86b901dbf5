"""From a TTIR module to C++. `emit` is the way in, and tells the story downwards."""
