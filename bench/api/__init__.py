"""What `import bench` offers: run, load and compare from Python; the commands call the same functions.

Nothing below imports this package.
"""
