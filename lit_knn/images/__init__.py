"""Images on a disk, as zips, folders and arrays, and the mapped `.npy` made from them. Needs no torch."""
