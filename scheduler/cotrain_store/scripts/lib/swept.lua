-- swept: which segments of the spool take no references any more, since they are removed. A writer numbers
-- its segments, so that the highest of those removed stands for all before it.
local function writer_of(segment)
  local writer, number = string.match(segment, '^(.+)%-(%d+)$')
  writer = writer or segment
  return 'cotrain:spool:swept:' .. writer, tonumber(number or 0)
end

local function is_swept(segment)
  local key, number = writer_of(segment)
  return number <= tonumber(redis.call('GET', key) or -1)
end

-- Of a result that lies in a file (`count_file`).
local function is_result_swept(result)
  local segment = string.match(result, '^[krt]spool:([^:]+):')
  return segment and is_swept(segment)
end
