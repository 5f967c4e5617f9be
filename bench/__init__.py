"""What is measured, and against what. Every bench ends with one line `bench-NAME key=value …`."""
