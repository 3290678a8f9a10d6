"""Images on a disk: zips, folders and arrays, and the mapped file that is made of them; needs no torch."""
