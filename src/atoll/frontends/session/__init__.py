"""What any front end needs of a cluster: handles, programs, the window, uploads and fetches."""
