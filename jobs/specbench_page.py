def render_page(about, results, cost):
    return "<html></html>"
