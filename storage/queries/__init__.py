"""Named SQL, one file per subject."""
