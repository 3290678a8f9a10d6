"""Images on a disk: zips, folders and arrays, and the mapped `.npy` made from them; needs no torch."""
