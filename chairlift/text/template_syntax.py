"""What is done to a chat template's syntax tree: paying is put into it, wherever Jinja has no hook for that."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

_SEARCHES = frozenset({"in", "notin"})


class Metering(NodeTransformer):
    """Puts paying into a template's syntax tree, wherever Jinja has no hook."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """A round of a loop, and what its condition lets not pass."""
        self.generic_visit(node)
        if node.test is not None:
            work = nodes.Const(_cost([node.test])[0])
            node.test = _filter("passed", node.test, work)
        return self._paid(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """A macro's body."""
        self.generic_visit(node)
        return self._paid(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        """A body that a macro calls."""
        self.generic_visit(node)
        return self._paid(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        """A body that `self.name()` calls."""
        self.generic_visit(node)
        return self._paid(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        """Texts that are put together."""
        self.generic_visit(node)
        node.nodes = [each if isinstance(each, nodes.Const) else _filter("written", each) for each in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        """A comparison costs no more than its smaller side; a search is one with each entry.

        Raises TemplateSyntaxError for a search beside other comparisons.
        """
        self.generic_visit(node)
        if any(operand.op in _SEARCHES for operand in node.ops):
            if len(node.ops) > 1:
                raise TemplateSyntaxError("put parentheses around what is compared beside an 'in'", node.lineno)
            [operand] = node.ops
            found = _filter("found", node.expr, operand.expr)
            return found if operand.op == "in" else nodes.Not(found, lineno=node.lineno)
        sides: list[Any] = [node, *node.ops]
        for index, side in enumerate(sides, start=1):
            if not isinstance(side.expr, nodes.Const):
                side.expr = _filter("operand" if index < len(sides) else "seen", side.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Dict:
        """Keys are hashed."""
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const) or not isinstance(pair.key.value, str):
                pair.key = _filter("key", pair.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """A slice is made anew."""
        self.generic_visit(node)
        return _filter("made", node) if isinstance(node.arg, nodes.Slice) else node

    def _paid(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        work, text = _cost(node.body)
        paying = _filter("spend", nodes.Const(work), nodes.Const(text))
        node.body.insert(0, nodes.ExprStmt(paying, lineno=node.lineno))
        return node


def _filter(name: str, node: Any, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, f"#{name}", list(args), [], None, None, lineno=node.lineno)


def _cost(body: Sequence[nodes.Node]) -> tuple[int, int]:
    """What running through a body costs: its nodes, and the text that stands in it."""
    work, text = len(body) + 1, 0
    for each in body:
        for node in each.find_all(nodes.Node):
            work += 1
            if isinstance(node, nodes.TemplateData):
                text += len(node.data)
            elif isinstance(node, nodes.Const) and isinstance(node.value, str):
                text += len(node.value)
    return work, text


class Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here the block is just its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """Put the block's content in the block's place."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
