"""Studies whose root is a URL: a working copy on this machine, and what keeps it and the URL alike."""
