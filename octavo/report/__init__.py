"""Reports as one HTML file that needs nothing from anywhere: the page, its tables, charts as inline SVG."""
