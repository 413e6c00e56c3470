"""torch's engines of distribution applied to a built model; the one folder, with distributed/, that imports them."""
