-- swept: removed segments of the spool, which accept no references any longer. A writer numbers its segments, so the
-- highest removed number covers all earlier ones.
local function writer_of(segment)
  local writer, number = string.match(segment, '^(.+)%-(%d+)$')
  writer = writer or segment
  return 'cotrain:spool:swept:' .. writer, tonumber(number or 0)
end

local function is_swept(segment)
  local key, number = writer_of(segment)
  return number <= tonumber(redis.call('GET', key) or -1)
end

-- Return true if the file of a result (`count_file`) was swept.
local function is_result_swept(result)
  local segment = string.match(result, '^[krt]spool:([^:]+):')
  return segment and is_swept(segment)
end
