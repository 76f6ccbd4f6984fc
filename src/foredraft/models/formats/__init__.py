"""Public layouts of draft heads, each as a pair of functions to and from the one that foredraft works in."""
