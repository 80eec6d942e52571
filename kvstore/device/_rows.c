/* Copies rows between an engine's memory and a slot with stores past the caches.
 *
 * Theory. A chunk is megabytes that nobody reads again soon. An ordinary store first reads the line that it
 * overwrites and then evicts whatever the engine and the daemon have in the caches; a non-temporal store does
 * neither, which takes a third off the traffic of a copy that the memory's bandwidth bounds. glibc's memcpy
 * does the same only above a large part of the last cache, and rows are far below. The processor's own
 * prefetcher stops at each page of 4 KiB, so rows of a few pages are read ahead here, into the next row.
 *
 * The interpreter lock is dropped for the whole copy. Rows are checked against both buffers before the first
 * byte moves, and their memory is held until the last one has. Where the processor isn't x86-64, rows are copied
 * by memcpy. The module says what it was compiled from, so that rows.py won't use an old one.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define LINE 64
/* Below it the lines at a row's ends, which are stored ordinarily, outweigh the others. */
#define STREAM_MIN 1024
/* How far ahead of the copy bytes are fetched; 3 to 8 KiB measure alike, less is slower at rows of 16 KiB. */
#define AHEAD 4096

typedef struct {
    char *rows;
    char *flat;
    const Py_ssize_t *index;
    size_t count;
    size_t row_bytes;
} Copy;

#if defined(__x86_64__)

static void store_line(char *to, const char *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* ``next`` is what is read after this row, for prefetching only: that may go past the mapping, as a prefetch of
 * what isn't there does nothing. */
static void copy_row(char *to, const char *from, size_t bytes, const char *next)
{
    size_t at = 0;
    if (bytes >= STREAM_MIN) {
        at = (size_t)(-(uintptr_t)to & (LINE - 1));
        memcpy(to, from, at);
        for (; at + 4 * LINE <= bytes; at += 4 * LINE) {
            uintptr_t ahead =
                at + AHEAD < bytes ? (uintptr_t)from + at + AHEAD : (uintptr_t)next + (at + AHEAD - bytes);
            for (int line = 0; line < 4; line++) {
                _mm_prefetch((const char *)(ahead + (uintptr_t)line * LINE), _MM_HINT_NTA);
            }
            for (int line = 0; line < 4; line++) {
                store_line(to + at + line * LINE, from + at + line * LINE);
            }
        }
    }
    memcpy(to + at, from + at, bytes - at);
}

/* Streamed bytes are visible to others once this has run. */
static void finish(void)
{
    _mm_sfence();
}

#else

static void copy_row(char *to, const char *from, size_t bytes, const char *next)
{
    (void)next;
    memcpy(to, from, bytes);
}

static void finish(void)
{
}

#endif

static char *row_at(const Copy *copy, size_t i)
{
    return copy->rows + (size_t)copy->index[i] * copy->row_bytes;
}

static void gather_rows(const Copy *copy)
{
    for (size_t i = 0; i < copy->count; i++) {
        const char *from = row_at(copy, i);
        const char *next = i + 1 < copy->count ? row_at(copy, i + 1) : from;
        copy_row(copy->flat + i * copy->row_bytes, from, copy->row_bytes, next);
    }
    finish();
}

static void scatter_rows(const Copy *copy)
{
    for (size_t i = 0; i < copy->count; i++) {
        const char *from = copy->flat + i * copy->row_bytes;
        copy_row(row_at(copy, i), from, copy->row_bytes, from + copy->row_bytes);
    }
    finish();
}

/* Whether these are native integers of a pointer's size, as numpy's intp. */
static int is_index(const Py_buffer *index)
{
    const char *format = index->format;
    return index->ndim == 1 && index->itemsize == (Py_ssize_t)sizeof(Py_ssize_t) && format != NULL &&
           format[0] != '\0' && strchr("ilqn", format[0]) != NULL && format[1] == '\0';
}

/* What a call was given, as ``copy``; -1 with an exception set where it doesn't fit together. */
static int describe(const Py_buffer *rows, const Py_buffer *index, const Py_buffer *flat, Copy *copy)
{
    if (rows->ndim != 2 || rows->itemsize != 1 || !is_index(index)) {
        PyErr_SetString(PyExc_ValueError, "rows: valid are bytes [rows, row bytes] and native integers [copied]");
        return -1;
    }
    copy->rows = rows->buf;
    copy->flat = flat->buf;
    copy->index = index->buf;
    copy->count = (size_t)index->shape[0];
    copy->row_bytes = (size_t)rows->shape[1];
    /* By division, as a product could overflow: rows may be mapped and never touched. */
    size_t fits = copy->row_bytes ? (size_t)flat->len / copy->row_bytes : 0;
    size_t left = copy->row_bytes ? (size_t)flat->len % copy->row_bytes : (size_t)flat->len;
    if (left != 0 || (copy->row_bytes != 0 && fits != copy->count)) {
        PyErr_Format(PyExc_ValueError, "rows: %zd bytes for %zu rows of %zu", flat->len, copy->count,
                     copy->row_bytes);
        return -1;
    }
    for (size_t i = 0; i < copy->count; i++) {
        if (copy->index[i] < 0 || copy->index[i] >= rows->shape[0]) {
            PyErr_Format(PyExc_IndexError, "rows: no row %zd; valid are 0..%zd", copy->index[i],
                         rows->shape[0] - 1);
            return -1;
        }
    }
    return 0;
}

/* ``args`` are rows, index and flat; the side that is written is the rows or flat. */
static PyObject *run(PyObject *args, int write_rows, void (*work)(const Copy *))
{
    PyObject *objects[3];
    Py_buffer views[3];
    Copy copy;
    int got = 0;
    if (!PyArg_ParseTuple(args, "OOO", &objects[0], &objects[1], &objects[2])) {
        return NULL;
    }
    for (; got < 3; got++) {
        int written = got == (write_rows ? 0 : 2);
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(objects[got], &views[got], flags) < 0) {
            break;
        }
    }
    int ready = got == 3 && describe(&views[0], &views[1], &views[2], &copy) == 0;
    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        work(&copy);
        Py_END_ALLOW_THREADS
    }
    while (got > 0) {
        PyBuffer_Release(&views[--got]);
    }
    if (!ready) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *gather(PyObject *module, PyObject *args)
{
    (void)module;
    return run(args, 0, gather_rows);
}

static PyObject *scatter(PyObject *module, PyObject *args)
{
    (void)module;
    return run(args, 1, scatter_rows);
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, "gather(rows, index, out): copy rows[index] to out."},
    {"scatter", scatter, METH_VARARGS, "scatter(rows, index, source): copy source to rows[index]."},
    {NULL, NULL, 0, NULL},
};

/* setup.py gives ROWS_SOURCE: a digest of this file. */
static int name_source(PyObject *module)
{
    return PyModule_AddStringConstant(module, "SOURCE", ROWS_SOURCE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, name_source}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_rows", "Row copies with stores past the caches.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
