"""Named, versioned arrays that outlive the scripts that publish them: a pure state machine."""
