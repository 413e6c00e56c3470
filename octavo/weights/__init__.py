"""Weight transport: new weights for a model, staged, verified and committed; in process, on disk, over HTTP."""
